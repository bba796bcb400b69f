"""Complete scripts to copy and change; `python -m lossfns.recipes list` names them."""
