-- current_exceptions.last_modified now also says that S3's SHA-256 of the full object was compared. Earlier rows compared headers only,
-- so the next plan compares their objects again, with a HEAD each.
UPDATE current_exceptions SET last_modified = NULL WHERE last_modified IS NOT NULL;
