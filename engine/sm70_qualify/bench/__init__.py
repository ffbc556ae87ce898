"""`sm70-bench`: how fast a server is, by the tokens that it returns."""
