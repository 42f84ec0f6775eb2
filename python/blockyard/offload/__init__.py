"""Joins the copy engine and the external tiers."""
