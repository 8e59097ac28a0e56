"""`paceline dashboard`: the report's views while runs go on, served to a browser on this machine."""
