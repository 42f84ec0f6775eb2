"""The demo and its workloads: the whole path, compared with the unpaged model."""
