"""Integrations with engines and models."""
