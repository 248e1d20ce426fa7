"""Inference engines: the contract (``base``), our own one (``embedded``), and the clients by which a data proxy drives
any of them (``clients``). Engine ports are never exposed; only the data proxy of the same replica calls them."""
