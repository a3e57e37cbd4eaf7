"""torchrun's handler for etcd v3, and the agent beside it."""
