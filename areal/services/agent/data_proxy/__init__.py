"""The data proxy of one pair of an agent service: keeps sessions in journals, runs turns on the pair's worker."""
