"""Fleet: several workers on one host behind the SMG gateway."""
