// Kueue's own types read the manifests of standard input, a JSON list, and refuse what they do not know.
// It prints a JSON list with an error for each, "" where there is none.
package main

import (
	"bytes"
	"encoding/json"
	"os"

	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
)

type manifest struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

func judge(text []byte) string {
	var told manifest
	if err := json.Unmarshal(text, &told); err != nil {
		return err.Error()
	}
	known := map[string]any{
		"ClusterQueue":   &kueue.ClusterQueue{},
		"LocalQueue":     &kueue.LocalQueue{},
		"ResourceFlavor": &kueue.ResourceFlavor{},
	}[told.Kind]
	if known == nil || told.APIVersion != kueue.GroupVersion.String() {
		return "unknown: " + told.APIVersion + " " + told.Kind
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(known); err != nil {
		return err.Error()
	}
	return ""
}

func main() {
	var manifests []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&manifests); err != nil {
		panic(err)
	}
	errors := make([]string, len(manifests))
	for index, text := range manifests {
		errors[index] = judge(text)
	}
	if err := json.NewEncoder(os.Stdout).Encode(errors); err != nil {
		panic(err)
	}
}
