"""Sharded values of an `ElasticState`: pieces, their copies, and pieces of other worlds."""
