"""Elastic PyTorch DDP training, coordinated through etcd v3."""

__version__ = "0.1.0"
