"""The command line: the launcher's flags, and `elastic-etcd status`."""
