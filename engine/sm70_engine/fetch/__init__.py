"""`sm70-fetch`: one revision of a model repository, in a folder, complete and checked."""
