"""A whole run in one thread and in virtual time, from a seed: the real syncer, store, link and exchange on a simulated network,
disk and clock. What happens in what order follows from the seed alone, so a seed that fails fails again."""
