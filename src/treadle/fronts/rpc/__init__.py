"""gRPC front: Treadle as a worker of the SMG gateway."""
