"""Complete scripts to copy: `python -m lossfns.recipes list`."""
