"""What was said to an earlier life of a site, and is heard by the present one."""

from tests.core.driven_site import BROKER, DrivenSite
from tops.core.client.site import RETRY
from tops.model.event_types import EventType
from tops.protocol.effects import CompleteRequest, SendOnLink
from tops.protocol.messages import Address, Dissemination, Envelope, Event, EventConfirmed, Origin, Published

LOG = EventType("log", {"mark": str}, durable=True)
EVENT = Event("log", {"mark": "m"})


def confirm(site: DrivenSite, incarnation: int) -> None:
    """The first publication of that life is on disk, and a broker says so to whoever has the site's link."""
    message = EventConfirmed(origin=Origin("log", 1), log_number=incarnation)
    to = Address(BROKER, site.core.name, incarnation)
    site.receive(Envelope(to=to, body=message))


def test_an_event_is_not_taken_for_confirmed_because_one_of_an_earlier_life_was() -> None:
    site = DrivenSite(incarnation=2)
    site.take(site.core.advertise(1, (LOG,)))
    site.take(site.core.publish(2, EVENT))

    confirm(site, incarnation=1)
    site.effects.clear()
    site.take(site.core.timer(RETRY, 1.0))

    said = [e.message for e in site.made(SendOnLink)]
    mine = Published(event=EVENT, origin=Origin("log", 1))
    assert [m.publication for m in said if isinstance(m, Dissemination)] == [mine]

    confirm(site, incarnation=2)

    assert [(a.request, a.value) for a in site.made(CompleteRequest)] == [(2, 2)]
