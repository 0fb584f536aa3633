"""What the router, the workers and the operator share: names, headers and messages. Imports none of the three."""

VERSION = "0.1.0"
