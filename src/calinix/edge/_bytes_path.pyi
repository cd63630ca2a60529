"""Types of the compiled form: those of the reference."""  # noqa: PYI021

from calinix.edge.bytes_path import Outlet as Outlet
from calinix.edge.bytes_path import Relay as Relay
from calinix.edge.bytes_path import count_events as count_events
from calinix.edge.bytes_path import whole_chunks as whole_chunks
from calinix.edge.bytes_path import with_end as with_end
