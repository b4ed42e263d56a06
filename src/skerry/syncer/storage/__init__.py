"""The syncer's durable state: the run folder, the tape, fragment versions, snapshots and good copies."""
