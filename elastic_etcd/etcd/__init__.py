"""The etcd client: requests, a lease session, a mirror, an embedded server."""
