"""The wire format and connections that learners, the syncer and its shards share. gRPC's errors become Skerry's errors here."""
