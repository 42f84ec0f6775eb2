"""Joins of the pieces with engines and models; one file for each."""
