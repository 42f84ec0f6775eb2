"""What engines of other sizes need, to share a store: keys and orders of bytes that do not depend on sizes."""
