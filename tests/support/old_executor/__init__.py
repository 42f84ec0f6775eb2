"""The executor before it was made of parts, for comparison."""
