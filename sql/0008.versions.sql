-- What an inventory listed beside its objects, and which objects it left out: shown with its time.
ALTER TABLE inventories ADD COLUMN all_versions boolean NOT NULL DEFAULT false;  -- every version is an object of it
ALTER TABLE inventories ADD COLUMN beside jsonb;    -- older versions, delete markers, deleted keys; NULL where not counted
ALTER TABLE inventories ADD COLUMN left_out jsonb;  -- objects by the filter that leaves them out; NULL before they were counted
