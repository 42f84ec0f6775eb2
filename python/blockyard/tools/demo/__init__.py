"""The demo and its workloads: the whole path, compared with an unpaged run."""
