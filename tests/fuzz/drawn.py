"""What schemathesis draws for the files of a form."""

import schemathesis
from hypothesis import strategies

# Its own are of a type that its own filters cannot judge (schemathesis 4.32: "Unsupported type: 'Binary'").
schemathesis.openapi.format("binary", strategies.binary().map(lambda content: content.decode("latin-1")))
