"""The endpoints, one file each: from a request to the engine's fields, from tokens to that API's words."""
