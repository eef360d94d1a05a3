"""What needs packages that not everybody has; each is imported where it is used."""
