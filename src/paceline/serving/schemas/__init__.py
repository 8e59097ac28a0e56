"""What clients send and get, by API: typed, so that the OpenAPI description comes from here."""
