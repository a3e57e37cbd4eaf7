"""`ElasticState`: values, snapshots, and how ranks get the newest one."""
