"""The processes around a relay that is measured: a mock worker, a mock engine, a bare relay, a load generator."""
