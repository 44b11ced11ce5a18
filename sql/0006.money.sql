-- What a purchase really came to: while a plan runs, the chain takes off what is left of it.

-- False while a purchase counts at its list price: its fate is not known, no node told what was taken, or an earlier version
-- settled it.
ALTER TABLE transactions ADD COLUMN cost_told boolean NOT NULL DEFAULT false;
