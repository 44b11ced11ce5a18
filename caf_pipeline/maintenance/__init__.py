"""What happens to stored chunks afterwards.

They are looked at again and again, read back as a whole, repaired, put back into an empty ledger;
CAF files of other programs are taken over; and it is said what may be deleted at the source. How a
chunk becomes located is `steps`, how one object is read is `retrieval`.
"""
