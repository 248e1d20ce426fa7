"""The processes around a relay that is measured: a mock worker, a mock engine, a load generator."""
