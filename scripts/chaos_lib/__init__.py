"""What scripts/chaos does: faults by a seeded schedule against a real job, and what must hold."""
