"""Clients over HTTP for what the services serve. The ones here need nothing but the standard library."""
