"""Generated from protos/ by scripts/protos; not edited by hand."""
