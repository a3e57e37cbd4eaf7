"""Elastic PyTorch DDP training, coordinated through etcd v3."""

from elastic_etcd.version import __version__ as __version__
