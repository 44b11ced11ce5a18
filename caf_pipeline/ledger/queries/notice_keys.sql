-- Records keys that events named. Sequencers of one length order a key's events; S3's documentation
-- pads shorter ones at the left, and also at the right. If the order is not known, the key is
-- listed once more.
INSERT INTO noticed_keys AS old (source_id, file_path, sequencer)
SELECT %(source_id)s, * FROM unnest(%(keys)s::bytea[], %(sequencers)s::text[])
ON CONFLICT (source_id, file_path) DO UPDATE SET (sequencer, listing) = (SELECT
    CASE WHEN known THEN old.sequencer ELSE excluded.sequencer END, CASE WHEN known THEN old.listing END
    FROM (SELECT length(old.sequencer) = length(excluded.sequencer) AND old.sequencer >= excluded.sequencer
        AND excluded.sequencer <> '' AS known) AS compared)
