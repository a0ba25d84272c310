"""Programs behind script/test and script/test-more: second tries, shards, and tests that a change affects."""
