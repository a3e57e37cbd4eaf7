"""The command line: the launcher's flags, and the commands of `elastic-etcd` beside it."""
