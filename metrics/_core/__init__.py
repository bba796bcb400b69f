"""What every metric stands on."""
