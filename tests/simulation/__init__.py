"""Deterministic simulation of a whole run in one thread and virtual time: the real syncer, store and learner on a simulated
network, disk and clock. Every event follows from the seed, so a failing seed can be reproduced."""
