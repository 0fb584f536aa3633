"""Virtual-time replay of request traces through the engine's scheduler, the router's choice and the rescaling law."""
