"""HTTP for every floor: the asyncio client and the header names."""
