"""Several workers on one host, with the SMG gateway in front of them."""
