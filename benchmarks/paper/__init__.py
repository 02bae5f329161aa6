"""The figures and tables of the TETRIS paper (Wu et al., ACL 2025), made again: docs/reproduction.md."""
