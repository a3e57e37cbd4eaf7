"""etcd v3 for one job: client, lease session, mirror, embedded server."""
