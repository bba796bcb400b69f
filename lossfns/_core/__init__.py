"""The kernel, and what every loss stands on: one idea per file."""
