"""What benches share: records, pairs, loads."""
