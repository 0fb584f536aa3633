"""Exit codes of workers and routers that whoever runs them tells apart."""

CONFIG = 78
"""EX_CONFIG of sysexits.h: started again with the same arguments and files, it would end the same way. The cause and
its remedy are the last line on standard error."""
