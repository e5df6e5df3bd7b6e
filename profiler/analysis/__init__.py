"""What trace files say: ledgers, collectives, late ranks, and what could be gained."""
